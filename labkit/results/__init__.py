"""What runs leave behind: the schema of a result file, histories of cases, and what may be compared."""
