"""WHERE stages run."""
