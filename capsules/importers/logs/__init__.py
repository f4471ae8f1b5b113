"""Readers of the lines that training programs print; a log mixes several of them."""
