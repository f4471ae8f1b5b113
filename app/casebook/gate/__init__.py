"""The gate: six questions to a fix, answered by running them, and a record in git that can be checked later."""
