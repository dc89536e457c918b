"""What all packages share: files, cores, time limits, child processes, plugins."""
