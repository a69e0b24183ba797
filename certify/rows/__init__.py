"""What every long command of this package stands on: the image list, rows on disk, processes, devices, intervals."""
