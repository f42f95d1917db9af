"""The command `onedesk`: one file per subcommand; each parses, calls and prints."""
