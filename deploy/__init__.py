"""What people run and ship: the command line, the demo model, Serve config files."""
