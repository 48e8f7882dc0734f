"""The maths: one file a method, plain tensors in and out, the paper's letters, one function an equation."""
