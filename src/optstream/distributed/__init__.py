"""Many ranks: who keeps which parameter, what they agree on, and what they send each other."""
