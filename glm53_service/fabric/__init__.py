"""The link between the nodes: what is there (sysfs, ip), which rails serve, and what a rank is told of it."""
