"""What runs in each rank: its life, the recording of what it calls, its device."""
