const name = tries => {
  const box = this.closest('.dplab-guess');
  const inputs = box?.querySelectorAll('input') ?? [], said = box?.querySelector('.dplab-said');
  if (!inputs.length || !said) return tries && setTimeout(name, 50, tries - 1);
  const question = box.querySelector('.dplab-question').textContent;
  const group = box.querySelector('.widget-radio-box'), id = `guess-${Math.random()}`;
  (group ?? inputs[0]).setAttribute('aria-label', question);
  group?.setAttribute('role', 'radiogroup');
  if (group) for (const input of inputs) {
    input.name = id;
    input.setAttribute('data-lm-suppress-shortcuts', 'true');
  }
  said.setAttribute('role', 'status');
};
name(100);
