"""What names a step of a run: trackers, links and records, which a trainer resumes by."""
