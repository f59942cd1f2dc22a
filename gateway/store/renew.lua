local shown = tonumber(ARGV[5])
if missing() then
  return reply('MISSING')
end
if fenced() then
  return reply('FENCED')
end
if ahead(false) or (shown and shown > length()) then
  return reply('MISMATCH')
end
return own(epoch)
