"""What every long command stands on: the image list, one resumable runner, rows on disk, processes, intervals."""
