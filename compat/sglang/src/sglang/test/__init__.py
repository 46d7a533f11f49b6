"""Names that tests of programs use."""
