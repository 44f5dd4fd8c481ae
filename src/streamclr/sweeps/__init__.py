"""Many runs: jobs, the places where they run (processes, Ray), the comparison of policies, the lab."""
