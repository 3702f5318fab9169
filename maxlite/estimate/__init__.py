"""What a step will cost, from its compiled program: memory, arithmetic, traffic between devices, time at best."""
