"""The machine and its devices: memory, cores, copies, which GPU a thread works on."""
