"""Reference computations, named faults, and the rules that use them."""
