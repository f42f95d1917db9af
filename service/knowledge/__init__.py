"""Documents of the user in one SQLite file per base, found again by words."""
