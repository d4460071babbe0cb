"""One file per queue policy; the file name is the policy's name."""
