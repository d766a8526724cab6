"""The exercises, a file each, named by its slug. What judges an answer to them: `dplab.checks`."""
