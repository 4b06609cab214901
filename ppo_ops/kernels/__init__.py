"""Device code: a kernel and its launcher a file. Nothing outside this package knows a device."""
