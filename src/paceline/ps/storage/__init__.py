"""What a server keeps on its disk: journal, snapshots, saves."""
