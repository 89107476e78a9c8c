"""WHAT is computed: stages, their schemas and their errors. Knows no graph and no node."""
