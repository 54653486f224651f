"""Virtual Sparks on one Linux machine: full systemd hosts in network namespaces, with sshd and Docker."""
