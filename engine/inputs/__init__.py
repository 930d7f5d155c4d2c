"""From a schedule to what the model reads: arrays, their copy to the device, and what the other ranks get."""
