for (const plot of document.querySelectorAll('[data-hover]')) {
  const hover = JSON.parse(plot.dataset.hover), rod = document.createElement('div'), tip = document.createElement('div');
  rod.className = 'rod'; tip.className = 'tip'; rod.hidden = tip.hidden = true; plot.append(rod, tip);
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect(), part = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const step = hover.low + part * (hover.high - hover.low), words = [];
    let at = null;
    for (const line of hover.lines) {
      let low = 0, high = line.points.length - 1;
      while (high - low > 1) { const mid = (low + high) >> 1; if (line.points[mid][0] < step) low = mid; else high = mid; }
      const near = Math.abs(line.points[low][0] - step) <= Math.abs(line.points[high][0] - step) ? low : high;
      const point = line.points[near];
      if (at === null) at = point[0];
      words.push(line.label + ' ' + point[1] + (point[0] === at ? '' : ' (step ' + point[0].toLocaleString('en') + ')'));
    }
    const x = (at - hover.low) / (hover.high - hover.low);
    rod.style.left = 100 * x + '%';
    tip.textContent = ['step ' + at.toLocaleString('en'), ...words].join('\n');
    rod.hidden = tip.hidden = false;
    const wide = tip.offsetWidth, left = x * box.width;
    tip.style.left = Math.min(Math.max(left - wide / 2, -48), box.width - wide) + 'px';
  });
  plot.addEventListener('pointerleave', () => { rod.hidden = tip.hidden = true; });
}
