"""The fault lab: defects planted in the real engine, and the score of the doctor."""
