"""What a loss does along single weights (the paper's Fig. 1)."""
