"""The methods: one file each, with its equations, its state and its public class."""
