"""What ``labkit doctor`` looks at, one noun a file. Standard library only."""
