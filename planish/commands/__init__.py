"""The subcommands of `planish`, a module each: `add_arguments(parser)` and `run(arguments)`."""
