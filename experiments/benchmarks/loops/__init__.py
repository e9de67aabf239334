"""Training loops under a plan, beside the same loops in plain PyTorch: equal, or refused clearly."""
