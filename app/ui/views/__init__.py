"""The views of an opened capsule, on the keys 1 to 9. One module each; ``VIEWS`` is the one list of them."""
