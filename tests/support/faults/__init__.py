"""For tests of what goes wrong: kills, full disks, lost power, flipped bits, failing services; and what has to hold then."""
