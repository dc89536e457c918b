"""What all packages share of the machine: files, cores, time limits, child processes, plugins."""
