"""Scripts that `deploy.doctor.checks` runs in processes of their own."""
