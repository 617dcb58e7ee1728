"""What every command's run shares: its settings, folder, threads, checkpoints and trainer."""
