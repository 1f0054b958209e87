"""pytest puts a conftest's folder on the path: `operator_cases` is for the folders below, too."""
