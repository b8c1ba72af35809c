"""Where readings come from: drivers, each owned by a child process that can be killed."""
