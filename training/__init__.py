"""How the demo models were made. Never installed, never imported by the product; run from the repository root."""
