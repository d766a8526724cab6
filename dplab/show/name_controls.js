// ipywidgets ties a slider's label to nothing, gives the index of a choice for its value, and its
// player's buttons have no names. `this` is a picture beside the controls.
const box = this.closest('.dplab-sliders');
box?.querySelectorAll('.widget-slider').forEach(slider => {
  const handle = slider.querySelector('[role=slider]');
  handle.setAttribute('aria-label', slider.querySelector('.widget-label').textContent);
  handle.setAttribute('aria-valuetext', slider.querySelector('.widget-readout').textContent);
});
box?.querySelectorAll('.widget-dropdown').forEach(choice => {
  choice.querySelector('select').setAttribute(
    'aria-label', choice.querySelector('.widget-label').textContent);
});
box?.querySelectorAll('.widget-play button').forEach((button, index) => {
  button.setAttribute('aria-label', ['play or pause', 'stop', 'repeat'][index]);
});
