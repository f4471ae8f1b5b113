"""The case log: cards, search, resolving, git."""
