"""Two runs side by side: ``compare`` finds where they part, ``types`` is what it says. Importing this costs nothing."""
