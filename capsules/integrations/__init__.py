"""Callbacks that put a recorder into trainers that own the loop; importing this package imports none of them."""
