"""Rules of the stage distributed: what ranks did together, and which of them did not."""
