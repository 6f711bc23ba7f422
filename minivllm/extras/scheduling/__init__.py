"""What a policy's knobs add to the scheduler: other policies, preemption, shedding."""
