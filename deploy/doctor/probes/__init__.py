"""Scripts that `deploy.doctor.probe` runs in processes of their own."""
