"""The basis of every long command: the image list, one resumable runner, rows on disk, processes, intervals."""
