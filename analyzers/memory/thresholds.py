"""Every threshold of the memory rules."""

#: Out of memory. Bytes by which sums of printed sizes may be off: three numbers of two decimals in GiB.
PRINTED = 16 << 20
#: Share of the device that the allocator holds unused however well it works: little slack.
LITTLE_SLACK = 0.05
#: Share of the device, and bytes, from which memory outside the allocator is more than contexts and libraries need.
OUTSIDE_SHARE, OUTSIDE_BYTES = 0.10, 2 << 30
#: The same where the process's own use is known, so that what is left belongs to others for certain.
OTHERS_SHARE, OTHERS_BYTES = 0.05, 1 << 30
#: Share of the device from which memory outside the allocator is no library of this process.
MOSTLY_OUTSIDE = 0.5
