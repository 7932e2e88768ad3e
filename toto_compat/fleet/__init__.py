"""What a fleet of machines needs: jobs from a plan, runs merged into one, issues for verdicts that changed."""
