"""Several engines in processes of their own, under test as one."""
