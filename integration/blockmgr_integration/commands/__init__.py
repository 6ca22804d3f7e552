"""One module a subcommand of `blockmgr`: options, progress, tables. The work is done elsewhere."""
