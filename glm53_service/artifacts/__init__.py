"""What has to be on a node before a rank can start: the image and the snapshot."""
